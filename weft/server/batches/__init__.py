"""Batches: JSONL files of requests, answered behind interactive traffic, and resumed after a restart."""
