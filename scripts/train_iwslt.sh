#!/usr/bin/env bash
# Train on IWSLT14 DE-EN as fairseq's example does, translate the test set, score:
#
#   KEY_DIM=128 COLAB=encoder_cross_decoder scripts/train_iwslt.sh [flags of fairseq-train]
#   scripts/train_iwslt.sh --tiny      all of it, small, on a small real corpus: minutes on two cores
#
# The published settings are those of fairseq's examples/translation: transformer_iwslt_de_en, Adam (0.9, 0.98), lr 5e-4
# after 4,000 warm-up updates with inverse square root decay, dropout 0.3, weight decay 1e-4, label smoothing 0.1, 4,096
# tokens an update, the checkpoint of best validation BLEU, beam 5. Its length is open; here 50,000 updates
# (--max-update changes it). The paper has no run on this corpus.
#
# Variables: KEY_DIM, COLAB (value of --collaborative-heads), MIX_LAYOUT, MIX_DIM, SEED, DATA (binarised folder),
# SAVE_DIR, AVERAGE (checkpoints, 0: the best one), DRY_RUN=1 (print the commands), and those of launch.sh
# (NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR); MAX_TOKENS is what one process takes at once (default 4096).
# Data: python -m data_prep iwslt14_de_en --destdir data/iwslt14
# The same command again goes on where it was; docs/recipes.md.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/recipe_common.sh"
run_recipe iwslt "$@"
