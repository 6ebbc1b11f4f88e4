"""The steps of a conversion that run the model on calibration text: moments, refinement, distillation.

What is learnt is ``decomposition``; how fairseq's models run is ``fairseq_modules.observed``.
"""

from fairseq_collab.attention import CollaborativeAttention
from fairseq_collab.conversion import Job
from fairseq_collab.decomposition.calibration import Whitening
from fairseq_collab.decomposition.observation import collect_moments
from fairseq_collab.decomposition.refine import Student, distill, refine_layers
from fairseq_collab.fairseq_modules.observed import FairseqModel


def observe_original(job: Job) -> FairseqModel:
    """The original model on the calibration text; the moments of the attentions become whitenings."""
    request = job.request
    original = FairseqModel(job.state, request.calibrate, request.device)
    count = original.sample("train", request.sentences, request.seed, request.progress)
    job.report.settings["calib"] = count
    job.report.unit = original.unit
    names = {one.prefix for one in job.found}
    moments = collect_moments(original, request.progress)
    job.whitenings = {name: Whitening.of(*pair) for name, pair in moments.items() if name in names}
    return original


def refine(job: Job, original: FairseqModel) -> None:
    """Trains every converted layer against the original one."""
    students = {}
    for one in job.found:
        prefix = f"{one.prefix}."
        own = {key.removeprefix(prefix): tensor for key, tensor in job.weights.items() if key.startswith(prefix)}
        width = own["k_proj.weight"].size(1)
        module = CollaborativeAttention.from_config(
            job.configs[one.prefix], job.shapes[one.kind].embed_dim, one.num_heads, kdim=width, vdim=width
        )
        module.load_state_dict(own)
        module.float().eval().requires_grad_(False).to(original.device)
        students[one.prefix] = Student(module, job.whitenings[one.prefix])
    errors = refine_layers(original, students, job.request.refine_steps, job.request.progress)
    for row in job.report.rows:
        job.write_trained(row["name"], students[row["name"]].module)
        row["output_error"] = errors[row["name"]][1] ** 0.5
        row["output_error_before"] = errors[row["name"]][0] ** 0.5


def distill_model(job: Job, original: FairseqModel) -> None:
    """Trains the converted attentions on the predictions of the original model."""
    student = FairseqModel(job.state, job.request.calibrate, job.request.device)
    layers = {one.prefix: Student(student.modules[one.prefix], job.whitenings[one.prefix]) for one in job.found}
    steps, progress = job.request.distill_steps, job.request.progress
    job.report.divergence = list(distill(original, student.log_probs, list(layers.values()), steps, progress))
    for prefix, layer in layers.items():
        job.write_trained(prefix, layer.module)
