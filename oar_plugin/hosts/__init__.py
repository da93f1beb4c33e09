"""What knows a host, a folder each. TRL's and ms-swift's trainers share `accelerated`; `vllm` scores copies for `verl`."""
