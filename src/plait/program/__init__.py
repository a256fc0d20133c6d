"""WHO, WHEN: (Graph, Plan) to each rank's instructions, and their simulation."""
