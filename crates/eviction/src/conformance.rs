//! What every eviction policy must keep to.
