"""What views are made of: tables, the drawn topology, lines over time. All that they show is text, never
markup: names, topics and payloads come from whoever can reach a broker."""
