"""Building blocks of models of parts: poses, templates, selection of parents, painting."""
