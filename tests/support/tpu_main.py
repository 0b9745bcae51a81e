"""Runs paxlite.main on CPUs as JAX would on a machine that has TPUs."""

import os
import sys

from jax._src.clusters import cloud_tpu_cluster

from paxlite import main

cloud_tpu_cluster.running_in_cloud_tpu_vm = True
os.environ.pop('TPU_SKIP_MDS_QUERY', None)  # JAX sets it where there are no chips.

sys.exit(main.main(sys.argv))
