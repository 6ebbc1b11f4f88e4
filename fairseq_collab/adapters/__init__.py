"""Where models keep their attention: one file a family. ``ADAPTERS`` are those for modules, by name."""

ADAPTERS = {
    "BERTCollaborativeAdapter": "bert",
    "DistilBERTCollaborativeAdapter": "distilbert",
    "ALBERTCollaborativeAdapter": "albert",
}
