"""Live engines as scorers: each runs in a process of its own and answers with log-probabilities and what really ran.

Life of a scoring. `plan` turns a prepared replay into jobs (one engine, one checkpoint, one dtype, several passes);
`child` starts `python -m rlk_ledger_replay.scorers.<engine> JOB ANSWER` for each, under the interpreter that has the
engine, and ends it at its deadline. In there `serve` opens the engine, runs pass after pass and writes a frame for
each, so that what was finished survives a crash of what was not. `protocol` holds the frames, `engines` the table.
"""
