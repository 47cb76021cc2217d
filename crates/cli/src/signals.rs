//! Ctrl-C and SIGTERM.

use std::fmt;
use std::io;
use std::sync::Arc;
#[cfg(feature = "remote")]
use std::sync::atomic::AtomicBool;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::time::timeout;

/// Nothing is done that Ctrl-C could stop: it ends the program.
const IDLE: u8 = 0;
/// Something is done that Ctrl-C stops.
const RUNNING: u8 = 1;
/// Ctrl-C has come. Another one ends the program.
const INTERRUPTED: u8 = 2;

/// Ctrl-C where it stops what is done and not the program. The default hears no signal.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt {
    state: Arc<AtomicU8>,
}

impl Interrupt {
    /// Hears Ctrl-C from now on.
    ///
    /// # Errors
    /// If no thread can be started, or the system refuses a signal handler.
    pub(crate) fn listen() -> io::Result<Interrupt> {
        let interrupt = Interrupt::default();
        let (state, runtime) = (interrupt.state.clone(), Builder::new_current_thread().enable_all().build()?);
        // The handler stands before this returns: a line editor puts back the handler it found, and the default
        // one ends the program.
        if let Ok(refused) =
            runtime.block_on(async { timeout(Duration::ZERO, tokio::signal::ctrl_c()).await })
        {
            refused?;
        }
        let hear = move || {
            runtime.block_on(async {
                while tokio::signal::ctrl_c().await.is_ok() {
                    let (was, is) = (RUNNING, INTERRUPTED);
                    if state.compare_exchange(was, is, Ordering::Relaxed, Ordering::Relaxed).is_err() {
                        std::process::exit(130);
                    }
                }
            });
        };
        std::thread::Builder::new().name("signals".to_owned()).spawn(hear)?;
        Ok(interrupt)
    }

    /// Begins work that Ctrl-C stops. The work ends when the returned value is dropped.
    pub(crate) fn running(&self) -> Interruptible<'_> {
        self.state.store(RUNNING, Ordering::Relaxed);
        Interruptible { state: &self.state }
    }
}

/// Work that Ctrl-C stops, while it runs.
#[derive(Debug)]
pub(crate) struct Interruptible<'a> {
    state: &'a AtomicU8,
}

impl Interruptible<'_> {
    /// Whether Ctrl-C has come.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.state.load(Ordering::Relaxed) == INTERRUPTED
    }

    /// # Errors
    /// [`Interrupted`] once Ctrl-C has come.
    pub(crate) fn check(&self) -> Result<(), Interrupted> {
        if self.is_interrupted() { Err(Interrupted) } else { Ok(()) }
    }
}

impl Drop for Interruptible<'_> {
    fn drop(&mut self) {
        self.state.store(IDLE, Ordering::Relaxed);
    }
}

/// Something was stopped by Ctrl-C before it had a result.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("stopped")
    }
}

impl std::error::Error for Interrupted {}

/// Sets a flag at Ctrl-C or SIGTERM. A second one ends the program at once.
///
/// # Errors
/// If no thread can be started.
#[cfg(feature = "remote")]
pub(crate) fn stop_flag() -> io::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let (set, runtime) = (flag.clone(), Builder::new_current_thread().enable_all().build()?);
    let wait = move || {
        runtime.block_on(async {
            refrain_server::stop_signal().await;
            set.store(true, Ordering::Relaxed);
            // The second signal is waited for here.
            std::future::pending::<()>().await;
        });
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(wait)?;
    Ok(flag)
}
