"""Plots and tables of finished runs, made only from the files in `metrics/`."""

import logging

logging.getLogger("matplotlib").setLevel(logging.WARNING)  # the first time on a machine it logs that it lists the fonts
