# paxlite on NVIDIA GPUs, in the clone:
#   docker build --file docker/cuda.Dockerfile --tag paxlite:cuda .
#   docker run --gpus all --shm-size=8g --volume "$PWD/runs:/runs" paxlite:cuda train Synthetic126M --folder=/runs/first
# The wheels of jax bring CUDA 13. The host needs NVIDIA's driver 580 or newer, and its container toolkit.
FROM python:3.12-slim

# the scripts for Slurm look for the checkout here: CONTAINER in docs/clusters.md
WORKDIR /opt/paxlite

# packages first, so that a change of the code does not download them again
COPY pyproject.toml README.md ./
COPY paxlite/__init__.py paxlite/__init__.py
RUN python -m pip install --no-cache-dir '.[cuda13,hf,serve,weights]'

COPY . .
RUN python -m pip install --no-cache-dir --no-deps --force-reinstall .

WORKDIR /
ENTRYPOINT ["paxlite"]
CMD ["--help"]
