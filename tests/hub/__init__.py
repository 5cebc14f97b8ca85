"""A local Hub: what `huggingface_hub` and kcache need of the Hugging Face Hub, on loopback, with faults on demand.

`python -m tests.hub --root DIR` runs one; `tests.hub.process.HubProcess` runs one for a test, as a process of its own.
Modules: `state` (repositories on disk), `access` (tokens, and who may do what), `limits` (rate limits), `endpoints` (the
protocol), `uploads` (LFS), `xet` (tokens, a local content-addressed store), `faults`, `application` (dispatch, admin's paths).
"""
