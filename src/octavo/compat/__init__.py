"""Names of other libraries over Octavo's rooms, for code that was written for them.

    octavo.compat.transformer_engine     NVIDIA's Transformer Engine
    octavo.compat.float8_experimental    pytorch-labs' float8_experimental
    octavo.compat.quickstart_utils       what Transformer Engine's tutorials import beside it

`install` makes their own import lines find these.
"""

from octavo.compat.installation import install, uninstall

__all__ = ["install", "uninstall"]
