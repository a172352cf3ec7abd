"""What models of parts are built of: poses, templates, selection of parents, painting."""
