"""Every rollout of a run as Parquet, in `rollouts/` in its folder: written by `Recorder`, read by `Store`.

A file has the rollouts of an iteration (`iter_000.parquet`) or evaluation (`eval_init.parquet`), a row per completion,
and in its metadata their origin.
"""
