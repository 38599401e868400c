"""Expert parallelism over the GPUs of one host: checked and measured (`fathom bench ep`)."""
