//! The lease of the one collector that is at work.
//!
//! The n-th collector creates the object `lease.<n>`, which an object store lets one alone do, and writes it again while it lives. One that did
//! not change for the lease's time, by the watch of the collector that waits, is a dead collector's, and the next one may be created. Two
//! collectors at once would do no harm: they would do the same work twice.

use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use refrain_store::Objects;

use crate::error::{Error, Result};

/// The folder of leases, and of what else collectors write.
pub(super) const GARBAGE: &str = "garbage";
/// Parts of its time in which a lease is renewed.
const RENEWALS: u32 = 5;
/// The longest pause between two looks at another's lease.
const PAUSE: Duration = Duration::from_secs(2);

/// A lease that is held until it is dropped.
#[derive(Debug)]
pub(super) struct Lease<'a> {
    objects: &'a Objects,
    generation: u32,
    time: Duration,
    renewed: Instant,
    count: u64,
}

/// A lease as a listing shows it.
#[derive(PartialEq, Eq)]
struct Listed {
    generation: u32,
    version: String,
    written: SystemTime,
}

fn name(generation: u32) -> String {
    format!("{GARBAGE}/lease.{generation}")
}

/// The leases, oldest first.
fn listed(objects: &Objects) -> Result<Vec<Listed>> {
    let of = |object: refrain_store::ListedObject| {
        let generation = object.name.strip_prefix(GARBAGE)?.strip_prefix("/lease.")?.parse().ok()?;
        Some(Listed { generation, version: object.version(), written: object.written })
    };
    let mut found: Vec<Listed> = objects.list(GARBAGE, None)?.into_iter().filter_map(of).collect();
    found.sort_unstable_by_key(|lease| lease.generation);
    Ok(found)
}

impl<'a> Lease<'a> {
    /// Takes the lease. If there is one, waits for its time to see whether its collector lives.
    ///
    /// # Errors
    /// If it does, or the object store does not answer.
    pub(super) fn acquire(objects: &'a Objects, time: Duration) -> Result<Lease<'a>> {
        let busy = || Error::Garbage(format!("another program collects the garbage of {}", objects.url()));
        let last = listed(objects)?.pop();
        if last.is_some() {
            let began = Instant::now();
            while began.elapsed() < time {
                sleep((time / RENEWALS).min(PAUSE));
                if listed(objects)?.pop() != last {
                    return Err(busy());
                }
            }
        }
        let generation = last.map_or(0, |last| last.generation).saturating_add(1);
        match objects.create(&name(generation), b"0".to_vec())? {
            Some(_) => Ok(Lease { objects, generation, time, renewed: Instant::now(), count: 0 }),
            None => Err(busy()),
        }
    }

    /// When the lease was last written, by the object store's clock.
    pub(super) fn now(&self) -> Result<SystemTime> {
        let own = listed(self.objects)?.into_iter().find(|lease| lease.generation == self.generation);
        own.map(|own| own.written).ok_or_else(|| self.lost())
    }

    /// Renews the lease, when it is time.
    ///
    /// # Errors
    /// If another collector took it, or the object store does not answer.
    pub(super) fn renew(&mut self) -> Result<()> {
        if self.renewed.elapsed() < self.time / RENEWALS {
            return Ok(());
        }
        if listed(self.objects)?.pop().is_none_or(|last| last.generation != self.generation) {
            return Err(self.lost());
        }
        self.count += 1;
        self.objects.put(&name(self.generation), self.count.to_string().into_bytes())?;
        self.renewed = Instant::now();
        Ok(())
    }

    fn lost(&self) -> Error {
        Error::Garbage(format!("another program took over the garbage of {}", self.objects.url()))
    }
}

impl Drop for Lease<'_> {
    /// Gives the lease back, and deletes those of dead collectors before it. One that cannot be given back counts as dead after its time.
    fn drop(&mut self) {
        let own = listed(self.objects).unwrap_or_default();
        for lease in own.iter().filter(|lease| lease.generation <= self.generation) {
            let _ = self.objects.delete(&name(lease.generation));
        }
    }
}
