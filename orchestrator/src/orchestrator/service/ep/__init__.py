"""Expert-parallel groups of processes behind a prefill or decode role."""
