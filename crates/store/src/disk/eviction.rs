//! Which chunks go from the folder to make room.

use std::collections::BTreeSet;

use crate::index::{IndexError, IndexRow, Tables};
use crate::{ChunkKey, Limits, StoreError};

/// Chunks that go, in order, with their rows.
pub(crate) type Victims = Vec<(ChunkKey, IndexRow)>;

/// Chooses the chunks that must go for the rows of `tables` and a `new` one, which is not among them, to stay within
/// `limits`: those that have expired at `now` (s since 1970), then the least recently used that are not pinned, first of
/// each namespace that is over its quota and then of all. Other namespaces than the new row's are looked at only with
/// `every_namespace`.
///
/// It reads the rows that go, and one total a scope.
///
/// # Errors
/// [`StoreError::NoRoom`] if the new row does not fit beside the pinned chunks.
pub(crate) fn choose_victims(
    tables: &Tables<'_>,
    new: Option<&IndexRow>,
    limits: &Limits,
    every_namespace: bool,
    now: u64,
) -> Result<Victims, IndexError> {
    let mut victims = tables.expired(now)?;
    let mut chosen: BTreeSet<ChunkKey> = victims.iter().map(|(key, _)| *key).collect();
    let mut namespaces: BTreeSet<String> = new.map(|row| row.namespace.clone()).into_iter().collect();
    if every_namespace && limits.has_quotas() {
        namespaces.extend(tables.namespaces()?);
    }
    let quotas = namespaces.iter().map(|namespace| (Some(namespace.as_str()), limits.quota_of(namespace)));
    for (scope, limit) in quotas.chain([(None, limits.disk)]) {
        let is_within = |row: &IndexRow| scope.is_none_or(|namespace| namespace == row.namespace);
        let sum = |rows: &mut dyn Iterator<Item = &IndexRow>| {
            rows.map(|row| row.bytes).fold(0, u64::saturating_add)
        };
        let (totals, own) = (tables.totals(scope)?, sum(&mut new.into_iter().filter(|row| is_within(row))));
        let mut going = victims.iter().map(|(_, row)| row).filter(|row| is_within(row));
        let mut bytes = totals.bytes.saturating_add(own).saturating_sub(sum(&mut going));
        let mut going = victims.iter().map(|(_, row)| row).filter(|row| is_within(row) && row.pinned);
        let pinned = totals.pinned_bytes.saturating_sub(sum(&mut going));
        if own > 0 && own.saturating_add(pinned) > limit {
            let namespace = scope.map(str::to_owned);
            return Err(StoreError::NoRoom { bytes: own, limit, pinned, namespace }.into());
        }
        if bytes <= limit {
            continue;
        }
        for entry in tables.least_recently_used(scope)? {
            let (key, row) = entry?;
            if chosen.insert(key) {
                bytes = bytes.saturating_sub(row.bytes);
                victims.push((key, row));
            }
            if bytes <= limit {
                break;
            }
        }
    }
    Ok(victims)
}
