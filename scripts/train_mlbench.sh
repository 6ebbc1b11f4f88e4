#!/usr/bin/env bash
# MLBench's translation task 4b (WMT17 EN-DE), which the first version of the paper uses: time to BLEU 25.
#
#   KEY_DIM=256 COLAB=encoder_cross_decoder scripts/train_mlbench.sh [flags of fairseq-train]
#   scripts/train_mlbench.sh --tiny    all of it, small, on a small real corpus: minutes on two cores
#
# The published settings are those of MLBench's reference run: width 1024, feed-forward 4096, 6+6 layers, 16 heads, layer
# norm before, all dropouts 0.1, shared embeddings, at most 80 positions, 2^17 tokens an update on any number of
# processes, 10 epochs, Adam (0.9, 0.98) eps 1e-9, lr 1.976e-3 after 1,000 warm-up updates with inverse square root decay,
# label smoothing 0.1, fp16 from scale 2^7 with window 2,000, seed 42. Each 30% of an epoch newstest2014 is translated
# with beam 4 and length penalty 0.6; the result is the time of training until that gives BLEU 25 (light goal: 20), summed
# over resumed runs. It does not stop there, and at the end the best checkpoint is scored.
#
# Variables: KEY_DIM, COLAB (value of --collaborative-heads), MIX_LAYOUT, MIX_DIM, SEED, DATA (binarised folder),
# SAVE_DIR, AVERAGE (checkpoints, 0: the best one), DRY_RUN=1 (print the commands), and those of launch.sh
# (NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR); MAX_TOKENS is what one process takes at once (default 8192).
# Data: python -m data_prep wmt17_en_de --destdir data/wmt17
# The same command again goes on where it was; docs/recipes.md.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/recipe_common.sh"
run_recipe mlbench "$@"
