"""What answers rows: vLLM in this process, a server, or an echo."""
