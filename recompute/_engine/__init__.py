"""The engine: four callbacks over a graph, and the parts that they are made of."""
