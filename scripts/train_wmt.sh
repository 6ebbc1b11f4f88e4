#!/usr/bin/env bash
# Train on WMT16 EN-DE as the paper does, average, translate newstest2014, score:
#
#   KEY_DIM=128 COLAB=encoder_cross_decoder scripts/train_wmt.sh [flags of fairseq-train]
#   scripts/train_wmt.sh --tiny        all of it, small, on a small real corpus: minutes on two cores
#
# The published settings are those of the original package's README: transformer_wmt_en_de, shared embeddings, Adam
# (0.9, 0.98), lr 7e-4 after 4,000 warm-up updates with inverse square root decay, dropout 0.1, label smoothing 0.1, fp16,
# 4 GPUs x 2 x 3,584 = 28,672 tokens an update, which any number of processes gets here. COLAB=none is its baseline. It
# gives no length: 100,000 updates are those of the base model of Vaswani et al. (--max-update changes it). The last 10
# epochs averaged, beam 4 and length penalty 0.6 are fairseq's examples/scaling_nmt.
#
# Variables: KEY_DIM, COLAB (value of --collaborative-heads), MIX_LAYOUT, MIX_DIM, SEED, DATA (binarised folder),
# SAVE_DIR, AVERAGE (checkpoints, 0: the best one), DRY_RUN=1 (print the commands), and those of launch.sh
# (NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR); MAX_TOKENS is what one process takes at once (default 3584).
# Data: python -m data_prep wmt16_en_de_bpe32k --destdir data/wmt16
# The same command again goes on where it was; docs/recipes.md.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/recipe_common.sh"
run_recipe wmt "$@"
