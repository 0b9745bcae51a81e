"""The identity of a run in its folder."""

from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.gpt import GPT126M
from paxlite.experiments.identity import is_of, write_configuration


def test_a_folder_is_of_the_class_that_wrote_it_and_of_no_other(tmp_path):
  small = dict(ICI_MESH_SHAPE=[1, 1, 1], DCN_MESH_SHAPE=[1, 1, 1])
  assert not is_of(TinyGPT(), tmp_path)
  write_configuration(TinyGPT(**small), tmp_path)
  assert is_of(TinyGPT(MAX_STEPS=7), tmp_path)
  assert not is_of(GPT126M(**small), tmp_path)
