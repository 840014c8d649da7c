"""Run OpenAI batch files on vLLM as one Airflow task. This module imports nothing: both sides pass through it."""

__version__ = "0.1.0"
