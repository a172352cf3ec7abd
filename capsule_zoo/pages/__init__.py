"""Contents of the README, pages and site: tables of records, published numbers, stories."""
