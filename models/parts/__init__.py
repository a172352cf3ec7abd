"""Building blocks of models of parts: poses, templates, parent selection, painting."""
