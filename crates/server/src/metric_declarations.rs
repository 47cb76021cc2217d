//! Declarations of metrics: one line makes a field, and registers it.

use std::sync::atomic::Ordering::Relaxed;

use prometheus_client::metrics::counter::Counter;

/// Sets a counter to a count since the start that is kept elsewhere, and never decreases.
pub(crate) fn set_count(counter: &Counter, count: u64) {
    counter.inner().store(count, Relaxed);
}

/// A struct of metrics, one a line: its field and type, how it begins where that is not its default, its name behind `refrain_`, and its
/// help. Its `register` makes them and adds them to a registry.
macro_rules! metrics {
    (@new $type:ty) => { <$type>::default() };
    (@new $type:ty = $initial:expr) => { $initial };
    ($(#[$attribute:meta])* struct $name:ident {
        $($vis:vis $field:ident: $type:ty $(= $initial:expr)?, $metric:literal, $help:literal;)*
    }) => {
        $(#[$attribute])*
        #[derive(Clone, Debug)]
        pub(crate) struct $name {
            $($vis $field: $type,)*
        }

        impl $name {
            pub(crate) fn register(registry: &mut Registry) -> $name {
                let metrics = $name { $($field: metrics!(@new $type $(= $initial)?),)* };
                $(registry.register(concat!("refrain_", $metric), $help, metrics.$field.clone());)*
                metrics
            }
        }
    };
}
pub(crate) use metrics;
