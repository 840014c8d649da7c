"""Objects in stores, over HTTP and on disk. Shared by both sides; imports neither."""
