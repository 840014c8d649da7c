"""The data plane: runs beside the engine, knows nothing of Airflow, and is reached only as a process."""
