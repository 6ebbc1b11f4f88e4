#!/usr/bin/env bash
# Pretrain RoBERTa base with collaborative heads on your text, and validate it:
#
#   python -m data_prep text --train my/train.txt --valid my/valid.txt --destdir data/roberta
#   KEY_DIM=192 scripts/pretrain_roberta.sh [flags of fairseq-train]
#   DATA=data-bin/wikitext scripts/pretrain_roberta.sh    what is binarised already, e.g. with GPT-2's BPE
#   scripts/pretrain_roberta.sh --tiny    all of it, small, on a small real corpus: minutes on two cores
#
# The published settings are those of fairseq's examples/roberta: Adam (0.9, 0.98) eps 1e-6, lr 5e-4 after 10,000 warm-up
# updates with linear decay to 125,000 updates, dropout 0.1, weight decay 0.01, 512 tokens a sequence, fp16, 8 GPUs x 16 x
# 16 = 2,048 sequences an update, which any number of processes gets here. The paper has no pretraining run.
#
# Variables: KEY_DIM, COLAB (encoder or none), MIX_LAYOUT, MIX_DIM, SEED, DATA (binarised folder), SAVE_DIR, AVERAGE
# (checkpoints, 0: the best one), DRY_RUN=1 (print the commands), and those of launch.sh (NPROC_PER_NODE, NNODES,
# NODE_RANK, MASTER_ADDR); MAX_SENTENCES is how many sequences one process takes at once (default 16).
# The same command again goes on where it was; docs/recipes.md.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/recipe_common.sh"
run_recipe roberta "$@"
