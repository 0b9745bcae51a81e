"""python -m benchmarks.aot [NAME…] [--table]: compiles large models for machines that are absent.

Compiles each NAME of CASES, or all of them, with `paxlite compile` in a separate process.
Reports go to benchmarks/results/aot/NAME.json. Needs the extras tpu and cuda, no device, and an
hour on two cores. --table prints the existing reports as a table.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

RESULTS = pathlib.Path(__file__).parent / 'results' / 'aot'

ON_256 = ['--fdl.ICI_MESH_SHAPE=[1,8,1]', '--fdl.DCN_MESH_SHAPE=[1,32,1]']
ON_512 = ['--fdl.ICI_MESH_SHAPE=[1,8,1]', '--fdl.DCN_MESH_SHAPE=[1,64,1]']
LEAN = ['--fdl.ATTENTION_BLOCK_SIZE=512', '--fdl.NUM_LOSS_CHUNKS=4']
KEPT = [
  '--fdl.DCN_MESH_SHAPE=[1,8,1]', '--fdl.NUM_LOSS_CHUNKS=8',
  '--fdl.CHECKPOINT_POLICY=SAVE_DOT_AND_ATTENTION',
]  # fmt: skip
SMALL = ['--fdl.USE_REPEATED_LAYER=True', '--fdl.CHECKPOINT_POLICY=SAVE_NOTHING']
# nothing is computed twice to save memory that there is
ROOMY = '--fdl.COMPILER_OPTIONS=[xla_gpu_memory_limit_slop_factor=130]'
# what XLA's scheduler is told of hosts that send 50 GB/s through eight adapters
SLOW_NETWORK = (
  'XLA_FLAGS=--xla_gpu_analytical_latency_estimator_options=nic_speed_gbps=6,gpus_per_node=8,rtt_us=2,'
  'chunk_prep_us=1,nccl_op_launch_us=5,chunk_size_bytes=4194304'
)
SLICES = ['--fdl.DCN_MESH_SHAPE=[2,1,1]']


def long_rows(tokens: int, ici: int, dcn: list[int], *flags: str) -> list[str]:
  """A row of so many tokens over `ici` × dcn[1] devices."""
  devices = ici * dcn[1]
  return [
    f'--fdl.MAX_SEQ_LEN={tokens}', f'--fdl.PERCORE_BATCH_SIZE={1 / devices}',
    '--fdl.NUM_LOSS_CHUNKS=8', '--fdl.CHECKPOINT_POLICY=SAVE_ATTENTION',
    '--fdl.MESH_AXES=[replica,data,mdl,context]',
    f'--fdl.DCN_MESH_SHAPE=[1,{dcn[0]},1,{dcn[1]}]', *flags,
  ]  # fmt: skip


def of_hosts(tokens: int, data: int, context: int) -> list[str]:
  return long_rows(tokens, 8, [data, context], '--fdl.ICI_MESH_SHAPE=[1,1,1,8]')


def of_slice(tokens: int, data: int, context: int) -> list[str]:
  return long_rows(tokens, context, [1, 1], f'--fdl.ICI_MESH_SHAPE=[1,{data},1,{context}]')


def on_one_slice(devices: int) -> list[str]:
  return [f'--fdl.ICI_MESH_SHAPE=[1,{devices},1]', '--fdl.DCN_MESH_SHAPE=[1,1,1]']


def rows_of_2048(devices: int) -> list[str]:
  rows = ['--fdl.PERCORE_BATCH_SIZE=4', '--fdl.MAX_SEQ_LEN=2048', '--fdl.NUM_LOSS_CHUNKS=4']
  return [*on_one_slice(devices), *rows]


CASES: dict[str, list[str]] = {
  # How compile time and bytes grow with the number of devices.
  'llama7b_h100x8': ['paxlite.experiments.llama.LLaMA7B', 'h100x8', '--fdl.PERCORE_BATCH_SIZE=2'],
  'llama7b_h100x64': [
    'paxlite.experiments.llama.LLaMA7B', 'h100x64', '--fdl.PERCORE_BATCH_SIZE=2',
    '--fdl.DCN_MESH_SHAPE=[1,8,1]',
  ],
  'llama7b_h100x256': [
    'paxlite.experiments.llama.LLaMA7B', 'h100x256', '--fdl.PERCORE_BATCH_SIZE=2', *ON_256[1:],
  ],
  'gpt126m_v5e_8': ['Synthetic126M', 'v5e-8', *SMALL, *on_one_slice(8)],
  'gpt126m_v5e_64': ['Synthetic126M', 'v5e-64', *SMALL, *on_one_slice(64)],
  'gpt126m_v5e_256': ['Synthetic126M', 'v5e-256', *SMALL, *on_one_slice(256)],
  # Products that are kept, with and without a loop over layers; FP8; and a small model.
  'llama8b_h100x64': ['LLaMA3_8B', 'h100x64', *KEPT],
  'llama8b_fp8_h100x64': ['LLaMA3_8B', 'h100x64', *KEPT, '--fdl.USE_FP8=True'],
  'llama8b_loop_h100x64': ['LLaMA3_8B', 'h100x64', *KEPT, '--fdl.UNROLL_LAYERS=[]'],
  'gpt5b_h100x256': ['GPT5B', 'h100x256'],
  'gpt5b_loop_h100x256': ['GPT5B', 'h100x256', '--fdl.UNROLL_LAYERS=[]'],
  'gpt5b_fp8_h100x256': ['GPT5B', 'h100x256', '--fdl.USE_FP8=True'],
  'gpt126m_h100x8': ['GPT126M', 'h100x8', '--fdl.DCN_MESH_SHAPE=[1,1,1]'],
  'gpt126m_data_h100x8': ['GPT126M', 'h100x8', *on_one_slice(8)],
  # Large models on GPUs.
  'gpt175b_h100x256': ['Synthetic175B', 'h100x256'],
  'gpt175b_lean_h100x256': ['Synthetic175B', 'h100x256', *LEAN],
  'gpt175b_tp8_h100x256': [
    'Synthetic175B', 'h100x256', *LEAN,
    '--fdl.ICI_MESH_SHAPE=[1,1,8]', '--fdl.DCN_MESH_SHAPE=[1,32,1]',
  ],
  'llama70b_h100x256': ['paxlite.experiments.llama.LLaMA70B', 'h100x256', *ON_256[1:], *LEAN],
  'llama70b_h100x512': ['paxlite.experiments.llama.LLaMA70B', 'h100x512', *ON_512[1:], *LEAN],
  'glam64b64e_h100x512': ['GLaM64B64E', 'h100x512'],
  'glam64b64e_lean_h100x512': ['GLaM64B64E', 'h100x512', *LEAN],
  # The same step on several meshes.
  'llama7b_replicas_h100x64': [
    'paxlite.experiments.llama.LLaMA7B', 'h100x64', '--fdl.PERCORE_BATCH_SIZE=2',
    '--fdl.DCN_MESH_SHAPE=[8,1,1]',
  ],
  'llama7b_tp8_h100x64': [
    'paxlite.experiments.llama.LLaMA7B', 'h100x64', '--fdl.PERCORE_BATCH_SIZE=2',
    '--fdl.ICI_MESH_SHAPE=[1,1,8]', '--fdl.DCN_MESH_SHAPE=[1,8,1]',
  ],
  'llama7b_long_h100x64': [
    'paxlite.experiments.llama.LLaMA7B', 'h100x64', '--fdl.MAX_SEQ_LEN=32768',
    '--fdl.PERCORE_BATCH_SIZE=0.125', '--fdl.NUM_LOSS_CHUNKS=8',
    '--fdl.MESH_AXES=[replica,data,mdl,context]',
    '--fdl.ICI_MESH_SHAPE=[1,1,1,8]', '--fdl.DCN_MESH_SHAPE=[1,8,1,1]',
  ],
  # Long rows.
  'llama8b_32k_h100x64': ['LLaMA3_8B', 'h100x64', *of_hosts(32768, 8, 1)],
  'llama8b_128k_h100x64': ['LLaMA3_8B', 'h100x64', *of_hosts(131072, 8, 1)],
  'llama8b_1m_h100x64': ['LLaMA3_8B', 'h100x64', *of_hosts(1 << 20, 1, 8)],
  'mistral7b_128k_h100x64': ['Mistral7B', 'h100x64', *of_hosts(131072, 8, 1)],
  'llama8b_128k_v5p_64': ['LLaMA3_8B', 'v5p-64', *of_slice(131072, 4, 8)],
  'llama8b_1m_v5p_64': ['LLaMA3_8B', 'v5p-64', *of_slice(1 << 20, 1, 32)],
  # Hosts that send 50 GB/s instead of 400.
  'gpt175b_slow_h100x256': ['Synthetic175B', 'h100x256', '--network=50', *LEAN],
  'gpt175b_pipeline_slow_h100x256': [
    'Synthetic175B', 'h100x256', '--network=50', *LEAN, '--fdl.MESH_AXES=[stage,replica,data,mdl]',
    '--fdl.ICI_MESH_SHAPE=[1,1,2,4]', '--fdl.DCN_MESH_SHAPE=[16,1,2,1]',
    '--fdl.NUM_MICROBATCHES=96', ROOMY, SLOW_NETWORK,
  ],
  'llama70b_slow_h100x256': [
    'paxlite.experiments.llama.LLaMA70B', 'h100x256', '--network=50', *ON_256[1:], *LEAN,
  ],
  'llama70b_mdl2_h100x256': [
    'paxlite.experiments.llama.LLaMA70B', 'h100x256', *LEAN, '--fdl.ICI_MESH_SHAPE=[1,4,2]',
    '--fdl.DCN_MESH_SHAPE=[1,32,1]',
  ],
  'llama70b_mdl2_slow_h100x256': [
    'paxlite.experiments.llama.LLaMA70B', 'h100x256', '--network=50', *LEAN,
    '--fdl.ICI_MESH_SHAPE=[1,4,2]', '--fdl.DCN_MESH_SHAPE=[1,32,1]',
  ],
  'llama70b_pipeline_slow_h100x256': [
    'paxlite.experiments.llama.LLaMA70B', 'h100x256', '--network=50', *LEAN,
    '--fdl.MESH_AXES=[stage,replica,data,mdl]', '--fdl.ICI_MESH_SHAPE=[1,1,4,2]',
    '--fdl.DCN_MESH_SHAPE=[8,1,4,1]', '--fdl.NUM_MICROBATCHES=64', ROOMY, SLOW_NETWORK,
  ],
  'gpt175b_h100x1024': [
    'Synthetic175B', 'h100x1024', *LEAN, '--fdl.PERCORE_BATCH_SIZE=2',
    '--fdl.DCN_MESH_SHAPE=[1,128,1]',
  ],
  'gpt175b_replicas_h100x1024': [
    'Synthetic175B', 'h100x1024', *LEAN, '--fdl.PERCORE_BATCH_SIZE=2',
    '--fdl.DCN_MESH_SHAPE=[4,32,1]',
  ],
  'gpt175b_tp8_h100x1024': [
    'Synthetic175B', 'h100x1024', *LEAN, '--fdl.PERCORE_BATCH_SIZE=2',
    '--fdl.ICI_MESH_SHAPE=[1,1,8]', '--fdl.DCN_MESH_SHAPE=[1,128,1]',
  ],
  'glam64b64e_expert_h100x512': [
    'GLaM64B64E', 'h100x512', *LEAN, '--fdl.MESH_AXES=[replica,data,mdl,expert]',
    '--fdl.ICI_MESH_SHAPE=[1,1,1,8]', '--fdl.DCN_MESH_SHAPE=[1,64,1,1]',
  ],
  # The models in MaxText's table.
  'maxtext16b_v5e_256': ['MaxText16B', 'v5e-256'],
  'maxtext32b_v5e_256': ['MaxText32B', 'v5e-256'],
  'maxtext64b_v5e_256': ['MaxText64B', 'v5e-256'],
  'maxtext128b_v5e_256': ['MaxText128B', 'v5e-256'],
  'maxtext16b_2xv5e_256': ['MaxText16B', '2xv5e-256', *SLICES],
  'maxtext32b_2xv5e_256': ['MaxText32B', '2xv5e-256', *SLICES],
  'maxtext64b_2xv5e_256': ['MaxText64B', '2xv5e-256', *SLICES],
  'maxtext128b_2xv5e_256': ['MaxText128B', '2xv5e-256', *SLICES],
  # The models in the comparison with MaxText's own programs.
  'llama7b_v5e_16': ['paxlite.experiments.llama.LLaMA7B', 'v5e-16', *rows_of_2048(16)],
  'gemma2b_v5e_16': ['Gemma2B', 'v5e-16', *rows_of_2048(16)],
  'llama13b_v5e_256': ['paxlite.experiments.llama.LLaMA13B', 'v5e-256', *rows_of_2048(256)],
}  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('names', nargs='*', metavar='NAME')
  parser.add_argument('--table', action='store_true')
  args = parser.parse_args()
  if args.table:
    print(table())
    return
  RESULTS.mkdir(parents=True, exist_ok=True)
  for name in args.names or CASES:
    experiment, target, *words = CASES[name]
    environment = dict(word.split('=', 1) for word in words if not word.startswith('--'))
    command = [sys.executable, '-m', 'paxlite', 'compile', f'--fdl_config={experiment}']
    command += [f'--target={target}', f'--json={RESULTS / name}.json']
    command += [word for word in words if word.startswith('--')]
    environment = os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    said = done.stdout if done.returncode == 0 else done.stderr[-2000:]
    print(name, said.splitlines()[0] if done.returncode == 0 else said, flush=True)


def table() -> str:
  """Returns a table of the existing reports, in the order of CASES."""
  lines = [
    '| case | mesh | batch a device | verdict | traffic (GB) | sent within, between (GB) |'
    ' compute | memory | exposed | step | MFU at most |',
    '|---|---|---|---|---|---|---|---|---|---|---|',
  ]
  for name in CASES:
    path = RESULTS / f'{name}.json'
    if not path.is_file():
      continue
    r = json.loads(path.read_text())
    mesh = ' × '.join(f'{a} {n}' for a, n in r['mesh'].items() if n > 1)
    costs = r['costs']
    within = sum(c['ici_bytes'] for c in costs['communication']) / 1e9
    between = sum(c['dcn_bytes'] for c in costs['communication']) / 1e9
    t = costs['roofline']
    alone = t.get('resources', t)  # reports of before 2026-12 have all seconds side by side
    parts = t.get('parts') or {k: t[k] for k in ('compute_bound', 'memory_bound', 'exposed')}
    exposed = parts.get('collectives', parts.get('exposed'))
    verdict = r['verdict'].split(', with')[0].replace(' of ', ' / ')
    lines.append(
      f'| {name} | {mesh} | {r["batch_size"] / r["devices"]:g} | {verdict} | '
      f'{costs["traffic"] / 1e9:,.0f} | {within:,.1f}, {between:,.1f} | {alone["compute"]:.3f} | '
      f'{alone["memory"]:.3f} | {exposed:.3f} | {sum(parts.values()):.3f} | '
      f'{r["mfu"][0]:.0%} |'
    )
  return '\n'.join(lines)


if __name__ == '__main__':
  main()
