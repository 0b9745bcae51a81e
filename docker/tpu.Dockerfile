# paxlite on TPU machines of Google Cloud, in the clone:
#   docker build --file docker/tpu.Dockerfile --tag paxlite:tpu .
#   docker run --privileged --net=host --volume "$PWD/runs:/runs" paxlite:tpu train Synthetic126M --folder=/runs/first
# Each host of a slice runs it; --net=host lets them find each other. Runs may be in gs:// folders.
FROM python:3.12-slim

# the scripts for Slurm look for the checkout here: CONTAINER in docs/clusters.md
WORKDIR /opt/paxlite

# packages first, so that a change of the code does not download them again
COPY pyproject.toml README.md ./
COPY paxlite/__init__.py paxlite/__init__.py
RUN python -m pip install --no-cache-dir '.[gcs,hf,serve,tpu,weights]'

COPY . .
RUN python -m pip install --no-cache-dir --no-deps --force-reinstall .

WORKDIR /
ENTRYPOINT ["paxlite"]
CMD ["--help"]
