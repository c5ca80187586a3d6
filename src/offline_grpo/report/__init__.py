"""Pictures and tables of finished runs, made from the files in `metrics/` alone."""
