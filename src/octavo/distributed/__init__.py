"""Several ranks: how amaxes agree. Importing it puts the agreement in force."""

from octavo.distributed.agreement import ProcessGroupAgreement

__all__ = ["ProcessGroupAgreement"]
