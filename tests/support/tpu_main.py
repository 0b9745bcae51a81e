"""Runs paxlite.main on CPUs as JAX would on a machine that has TPUs."""

import os
import sys

from jax._src.clusters import cloud_tpu_cluster

from paxlite import main

cloud_tpu_cluster.running_in_cloud_tpu_vm = True
if 'TPU_WORKER_ID' not in os.environ:  # On GKE, it is set. JAX also sets it if there are no chips.
  os.environ.pop('TPU_SKIP_MDS_QUERY', None)

sys.exit(main.main(sys.argv))
