"""What runs on the training ranks. The controller never imports it.

Importing this package prepares Megatron-core for machines without CUDA, because that only works before the first
`import megatron.core` of the process (see `mcore_cpu`).
"""

from hybridasync.worker import mcore_cpu

mcore_cpu.silence_known_warnings()
mcore_cpu.install()
