"""driftlab: why drafted tokens stop being accepted as a speculative decoder drafts deeper."""
