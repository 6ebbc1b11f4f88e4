"""From concatenated to collaborative heads: tensor decomposition of what the heads compute. Knows no model."""
