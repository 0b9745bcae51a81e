"""Pipeline parallelism: layers split into stages."""
