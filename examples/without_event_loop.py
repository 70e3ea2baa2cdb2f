"""The same client for a plain script: no async, no await.

postroad up                      # in another terminal
python examples/without_event_loop.py [HOST:PORT]
"""

import sys

import postroad

address = sys.argv[1] if len(sys.argv) > 1 else "localhost:7420"

with postroad.sync.connect(address) as client:
    # The loop below ends once nothing has come for two seconds.
    with client.subscribe("jobs/+", where="priority >= 5", timeout=2) as jobs:
        receipt = client.publish("jobs/backup", "nightly", attributes={"priority": 7})
        client.publish("jobs/cleanup", "some day", attributes={"priority": 1})
        sys.stdout.write(f"published {receipt.id}\n")
        for job in jobs:
            if isinstance(job, postroad.Event):
                sys.stdout.write(f"{job.topic}: {job.payload.decode()} {dict(job.attributes)}\n")
    sys.stdout.write(f"{client.request('status')['name']} says goodbye\n")
