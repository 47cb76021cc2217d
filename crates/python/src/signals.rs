//! Work in steps, between which signals are looked for.

use std::time::{Duration, Instant};

use pyo3::prelude::*;
use refrain::engine::Advance;

use crate::error::raise;

/// The time after which signals are looked for again. Other threads of Python may hold the interpreter's lock for some milliseconds each time.
const INTERVAL: Duration = Duration::from_millis(50);

/// Does steps until all is done. A signal, such as Ctrl-C, ends it between two steps.
pub(crate) fn advance(
    py: Python<'_>,
    mut step: impl FnMut() -> refrain::Result<Advance> + Send,
) -> PyResult<()> {
    while !advance_some(py, &mut step)? {}
    Ok(())
}

/// Does steps until all is done, which it says, or signals are to be looked for again.
pub(crate) fn advance_some(
    py: Python<'_>,
    mut step: impl FnMut() -> refrain::Result<Advance> + Send,
) -> PyResult<bool> {
    py.check_signals()?;
    let done = py.detach(|| -> refrain::Result<bool> {
        let began = Instant::now();
        while began.elapsed() < INTERVAL {
            if step()? == Advance::Done {
                return Ok(true);
            }
        }
        Ok(false)
    });
    done.map_err(raise)
}
