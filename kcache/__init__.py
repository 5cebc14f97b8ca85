"""kcache: kernels compiled once on a farm, accepted by the library in every container.

Importing this package loads neither torch nor FlashInfer, reads no environment and touches no disk.
"""

__version__ = "0.1.0"
