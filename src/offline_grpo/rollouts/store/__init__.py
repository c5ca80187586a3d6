"""Every rollout of a run as Parquet, in `rollouts/` in its folder: written by `Recorder`, read by `Store`.

A file has the rollouts of one iteration (`iter_000.parquet`) or evaluation (`eval_init.parquet`,
`eval_iter_009.parquet`), a row per completion, and says in its metadata which model, tokenizer, weights and
configuration they come from.
"""
