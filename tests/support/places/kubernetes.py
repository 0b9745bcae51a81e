"""Stands for the package kubernetes in a pod of a JobSet, as far as JAX asks it.

JAX finds the pod by its address, and by the pod's label the Job.
"""

import json
import os
import types

from jax._src.clusters import K8sCluster

_ANSWERS = json.loads(os.environ['FAKE_KUBERNETES'])  # the Job's name, JobSet and parallelism


def _load_incluster_config():
  K8sCluster._namespace = classmethod(lambda cls: 'default')  # It would read a file of the pod.


class _Core:
  def list_namespaced_pod(self, namespace, field_selector):
    assert field_selector.startswith('status.podIP=')
    owner = types.SimpleNamespace(controller=True, kind='Job')
    metadata = types.SimpleNamespace(labels={'job-name': _ANSWERS['job']}, owner_references=[owner])
    return types.SimpleNamespace(items=[types.SimpleNamespace(metadata=metadata)])


class _Batch:
  def read_namespaced_job(self, name, namespace):
    if name != _ANSWERS['job']:
      raise _ApiError
    labels = {'jobset.sigs.k8s.io/jobset-name': _ANSWERS['jobset']}
    metadata = types.SimpleNamespace(name=name, labels=labels)
    spec = types.SimpleNamespace(parallelism=_ANSWERS['parallelism'])
    return types.SimpleNamespace(metadata=metadata, spec=spec)


class _ApiError(Exception):
  status, reason = 403, 'Forbidden'


config = types.SimpleNamespace(load_incluster_config=_load_incluster_config)
client = types.SimpleNamespace(
  CoreV1Api=_Core, BatchV1Api=_Batch, exceptions=types.SimpleNamespace(ApiException=_ApiError)
)
