"""Plots and tables of finished runs, made only from the files in `metrics/`."""
