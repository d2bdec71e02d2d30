"""What is good for XLA:CPU alone: variants of forms and rows of `fusion_rules`, each beside what it was measured on.

Importing this package enters them. Other platforms never see them.
"""

from __future__ import annotations
