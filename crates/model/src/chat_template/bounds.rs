//! Bounds on memory, time and stack that a template may take: it comes with a model, and a model may come from anyone.
//!
//! The template engine counts fuel for instructions, for items and for bytes that are made, and compares values and writes them by
//! recursion. Fuel therefore bounds how deep values are, and the stack is large enough for that depth.
//!
//! The engine (3.1) takes no fuel for lists that are joined by `+`, nor for a list or a namespace that `~` or `==` reads. A list that is
//! joined to itself over and over is bounded by a deadline alone, and a namespace in itself that is compared or joined to a text is not
//! bounded.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};

use crate::error::{ModelError, Result, template_error};

/// Bytes of a template. Real ones have up to some 20 KiB.
pub(super) const MAX_SOURCE: usize = 64 << 10;
/// Fuel of a rendering. An instruction takes one, as do 64 bytes that are made; a message takes some hundred.
pub(super) const FUEL: u64 = 1_000_000;
/// Bytes of the stack of a thread that compiles or renders, of which only those in use take memory. Compiling [`MAX_SOURCE`] bytes of
/// operators takes some 32 MiB. [`FUEL`] gives values 600,000 levels deep, and half a KiB of stack writes a level.
const STACK: usize = 512 << 20;
/// Time that compiling or rendering may take. Real templates take milliseconds, and all of [`FUEL`] and [`MAX_SOURCE`] some seconds.
const DEADLINE: Duration = Duration::from_secs(30);
/// Levels of a value that is written as JSON. Tools and arguments have at most 128, which is the limit of their parser.
const MAX_DEPTH: usize = 256;

/// Refuses a template that is too large to be one.
pub(super) fn check_size(bytes: u64) -> Result<()> {
    if bytes > MAX_SOURCE as u64 {
        return Err(template_error(format!("has {bytes} bytes, more than the limit of {MAX_SOURCE}")));
    }
    Ok(())
}

/// Threads whose work has passed its deadline, each as long as it goes on.
#[derive(Debug, Default)]
pub(super) struct LateThreads(Mutex<Vec<Weak<()>>>);

impl LateThreads {
    fn push(&self, thread: Weak<()>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
    }

    fn any(&self) -> bool {
        let mut threads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| thread.strong_count() > 0);
        !threads.is_empty()
    }
}

/// Runs `work` of a template on a thread with a stack that no template overflows. A panic of the template engine is an error, and so is work
/// that takes longer than [`DEADLINE`]. Nothing can stop its thread, which goes on until the work ends: no further work of the template is begun
/// meanwhile.
pub(super) fn on_large_stack<T: Send + 'static>(
    late: &LateThreads,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    within(DEADLINE, late, work)
}

/// [`on_large_stack`] with another deadline.
pub(super) fn within<T: Send + 'static>(
    deadline: Duration,
    late: &LateThreads,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let is_late = || {
        let seconds = DEADLINE.as_secs();
        let why = "unless the machine stood still, it is damaged, or made to do harm; take the model from another source";
        let message = format!("takes more than {seconds} seconds and may never end: {why}");
        ModelError::TemplateFailed { message }
    };
    if late.any() {
        return Err(is_late());
    }
    let (sender, receiver) = channel();
    let builder = std::thread::Builder::new().name("chat template".to_owned()).stack_size(STACK);
    let running = Arc::new(());
    let thread = Arc::downgrade(&running);
    builder
        .spawn(move || {
            // The receiver is gone once the deadline has passed.
            let _ = sender.send(work());
            drop(running);
        })
        .map_err(ModelError::TemplateThread)?;
    match receiver.recv_timeout(deadline) {
        Ok(done) => done,
        Err(RecvTimeoutError::Timeout) => {
            late.push(thread);
            Err(is_late())
        }
        Err(RecvTimeoutError::Disconnected) => {
            let message = "makes the template engine panic; take the model from another source".to_owned();
            Err(ModelError::TemplateFailed { message })
        }
    }
}

/// Takes the fuel for writing a value as JSON, and refuses one that is too deep or lies in itself.
pub(super) fn charge_json(state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    charge(state, value, MAX_DEPTH)
}

fn charge(state: &State<'_, '_>, value: &Value, depth: usize) -> Result<(), Error> {
    let bytes = value.as_str().map_or(0, str::len);
    state.consume_fuel(1 + bytes as u64 / 64)?;
    let is_map = value.kind() == ValueKind::Map;
    if !is_map && value.kind() != ValueKind::Seq {
        return Ok(());
    }
    if depth == 0 {
        let message = format!("a value of more than {MAX_DEPTH} levels cannot be written");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    for item in value.try_iter()? {
        if is_map {
            charge(state, &value.get_item(&item)?, depth - 1)?;
        }
        charge(state, &item, depth - 1)?;
    }
    Ok(())
}
