//! What a job does: the interface between shards and their work.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::item::Item;

/// An error of the runner's machine.
pub type RunnerError = Box<dyn std::error::Error + Send + Sync>;

/// The reason for which work was not done.
#[derive(Debug)]
pub enum Undone {
    /// The item itself is at fault: it is tried again, and then given up.
    Item(String),
    /// This machine is at fault, whatever the item: the runner ends.
    Runner(RunnerError),
    /// The runner is to stop, or another has the shard.
    Interrupted,
}

impl<E: Into<RunnerError>> From<E> for Undone {
    fn from(error: E) -> Undone {
        Undone::Runner(error.into())
    }
}

/// The work of a job. All of it may be done twice, by several runners, at once or one after the other, to the same end.
pub trait Work {
    /// What an item holds.
    type Body: DeserializeOwned;

    /// The name of an item for people.
    fn name(&self, item: &Item<Self::Body>) -> String;

    /// Begins a shard; one that was begun before may have been left half-way.
    ///
    /// # Errors
    /// If the machine cannot do it.
    fn begin(&mut self) -> Result<(), Undone> {
        Ok(())
    }

    /// Of each item, whether it was done before.
    ///
    /// # Errors
    /// If that cannot be told.
    fn are_done(&mut self, items: &[Item<Self::Body>], _control: &Control<'_>) -> Result<Vec<bool>, Undone> {
        Ok(vec![false; items.len()])
    }

    /// Does an item.
    ///
    /// # Errors
    /// The reason for which it is not done.
    fn item(&mut self, item: &Item<Self::Body>, control: &Control<'_>) -> Result<(), Undone>;

    /// The reason for which this machine does no item any more, if there is one. It is asked for after an item failed or panicked.
    fn failure(&self) -> Option<RunnerError> {
        None
    }

    /// Brings the work of items that were done to where everyone finds it, so that no other runner does them again. False if their work
    /// is only in the result of the shard.
    ///
    /// # Errors
    /// If the machine cannot do it.
    fn keep(&mut self, _items: &[&Item<Self::Body>], _control: &Control<'_>) -> Result<bool, Undone> {
        Ok(false)
    }

    /// Ends the shard, when the work of all its items was kept that can be, and says what it came to.
    ///
    /// # Errors
    /// If the machine cannot do it.
    fn finish(&mut self) -> Result<Value, Undone>;
}

/// Says when work is to end.
#[derive(Clone, Copy, Debug)]
pub struct Control<'a> {
    /// Set when the runner is to stop.
    pub(crate) stop: &'a AtomicBool,
    /// Set when another runner has the shard.
    pub(crate) lost: &'a AtomicBool,
}

impl Control<'_> {
    /// Whether the work on the shard is to end before it is done.
    pub fn is_over(&self) -> bool {
        self.stop.load(Relaxed) || self.lost.load(Relaxed)
    }

    /// # Errors
    /// If the work is to end.
    pub fn check(&self) -> Result<(), Undone> {
        if self.is_over() { Err(Undone::Interrupted) } else { Ok(()) }
    }
}
