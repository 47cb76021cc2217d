//! Ingest, and waiting until what was ingested is in the object store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use refrain::Document;
use refrain::fusion::FusionMethod;

use crate::convert::to_python;
use crate::document::cut;
use crate::error::{RefrainError, raise, warn};
use crate::opened::Opened;
use crate::signals::advance_some;

/// Prefills documents and keeps them: the report of it.
pub(crate) fn ingest<'py>(
    py: Python<'py>,
    opened: &Opened,
    documents: &[Document],
    method: &Arc<dyn FusionMethod>,
    progress: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let chunks = cut(py, &opened.engine, documents)?;
    let mut ingest = py.detach(|| opened.engine.start_chunk_ingest(chunks, method)).map_err(raise)?;
    loop {
        let is_done = advance_some(py, || Ok(ingest.advance()?))?;
        if let (Some(progress), Some(news)) = (progress, ingest.new_progress()) {
            progress.call1((news.done, news.total))?;
        }
        if is_done {
            break;
        }
    }
    let report = py.detach(|| ingest.finish());
    if let Some(reason) = &report.not_stored {
        warn(py, format!("not all chunks are in the store, and those are computed again later: {reason}"))?;
    }
    let kept = py.detach(|| opened.in_library(|library| library.put(documents)));
    let unpublished = kept
        .as_ref()
        .map_or(0, |kept| kept.iter().filter(|document| document.published == Some(false)).count());
    // The chunks are of use without it, so that the ingest has not failed.
    if let Err(error) = kept {
        warn(py, format!("search does not find these documents: {error}"))?;
    }
    if unpublished > 0 {
        warn(
            py,
            format!("documents that other machines do not find yet: {unpublished}; flush() tries again"),
        )?;
    }
    let report = to_python(py, &report)?;
    report.set_item("unpublished", unpublished)?;
    Ok(report)
}

/// The time between two looks at what is still to be uploaded.
const PAUSE: Duration = Duration::from_millis(50);

/// Waits until the object store has all chunks and documents of this machine.
pub(crate) fn flush(py: Python<'_>, opened: &Opened, timeout: Option<f64>) -> PyResult<()> {
    let timeout = timeout.map(Duration::try_from_secs_f64).transpose();
    let timeout = timeout.map_err(|error| PyValueError::new_err(format!("timeout: {error}")))?;
    let began = Instant::now();
    while let Some((pending, trouble)) = py.detach(|| uploads(opened)) {
        if let Some(trouble) = trouble {
            let message = format!(
                "chunks that are not in the object store yet: {pending}, since {trouble}; they are uploaded once that is mended"
            );
            return Err(RefrainError::new_err(message));
        }
        if timeout.is_some_and(|timeout| began.elapsed() >= timeout) {
            return Err(PyTimeoutError::new_err(format!("chunks that are still to be uploaded: {pending}")));
        }
        py.check_signals()?;
        py.detach(|| std::thread::sleep(PAUSE));
    }
    py.detach(|| opened.sync()).map_err(raise)
}

/// The number of chunks that are still to be uploaded, and what is in the way; none where there is none.
#[cfg(feature = "remote")]
fn uploads(opened: &Opened) -> Option<(u64, Option<String>)> {
    let stats = opened.engine.store().remote_stats().filter(|stats| stats.pending > 0)?;
    Some((stats.pending, stats.down.or(stats.stuck)))
}

#[cfg(not(feature = "remote"))]
fn uploads(_opened: &Opened) -> Option<(u64, Option<String>)> {
    None
}
