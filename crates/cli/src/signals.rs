//! Ctrl-C and SIGTERM.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
#[cfg(feature = "remote")]
use std::sync::atomic::AtomicBool;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::time::timeout;

/// Nothing is done that a signal could stop: it ends the program.
const IDLE: u8 = 0;
/// Something is done that a signal stops.
const RUNNING: u8 = 1;
/// A signal has come. Another one ends the program.
const INTERRUPTED: u8 = 2;

/// Ctrl-C, or SIGTERM as well, where it stops what is done and not the program. The default hears no signal.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt {
    state: Arc<AtomicU8>,
}

impl Interrupt {
    /// Hears Ctrl-C from now on. SIGTERM ends the program.
    ///
    /// # Errors
    /// If no thread can be started, or the system refuses a signal handler.
    pub(crate) fn listen() -> io::Result<Interrupt> {
        Interrupt::hear(false)
    }

    /// Hears Ctrl-C and SIGTERM from now on: for work after which the program ends.
    ///
    /// # Errors
    /// If no thread can be started, or the system refuses a signal handler.
    pub(crate) fn listen_to_all() -> io::Result<Interrupt> {
        Interrupt::hear(true)
    }

    fn hear(hears_sigterm: bool) -> io::Result<Interrupt> {
        let interrupt = Interrupt::default();
        let (state, runtime) = (interrupt.state.clone(), Builder::new_current_thread().enable_all().build()?);
        // The handler stands before this returns: a line editor puts back the handler it found, and the default
        // one ends the program.
        if let Ok(refused) =
            runtime.block_on(async { timeout(Duration::ZERO, tokio::signal::ctrl_c()).await })
        {
            refused?;
        }
        let entered = runtime.enter();
        let mut sigterm = hears_sigterm.then(Sigterm::listen).transpose()?;
        drop(entered);
        refrain_server::leave_signals(hears_sigterm);
        let hear = move || {
            runtime.block_on(async {
                while next(sigterm.as_mut()).await.is_ok() {
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

    /// Begins work that a signal stops. The work ends when the returned value is dropped.
    pub(crate) fn running(&self) -> Interruptible<'_> {
        self.state.store(RUNNING, Ordering::Relaxed);
        Interruptible { state: &self.state }
    }
}

/// SIGTERM, on systems that have it.
struct Sigterm(#[cfg(unix)] tokio::signal::unix::Signal);

impl Sigterm {
    /// Hears it from now on, in the runtime that was entered.
    fn listen() -> io::Result<Sigterm> {
        Ok(Sigterm(
            #[cfg(unix)]
            tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?,
        ))
    }

    async fn recv(&mut self) {
        #[cfg(unix)]
        self.0.recv().await;
        #[cfg(not(unix))]
        std::future::pending::<()>().await;
    }
}

/// Waits for Ctrl-C, or SIGTERM where that is heard.
async fn next(sigterm: Option<&mut Sigterm>) -> io::Result<()> {
    let Some(sigterm) = sigterm else { return tokio::signal::ctrl_c().await };
    tokio::select! {
        heard = tokio::signal::ctrl_c() => heard,
        () = sigterm.recv() => Ok(()),
    }
}

/// Work that a signal stops, while it runs.
#[derive(Debug)]
pub(crate) struct Interruptible<'a> {
    state: &'a AtomicU8,
}

impl Interruptible<'_> {
    /// Whether a signal has come.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.state.load(Ordering::Relaxed) == INTERRUPTED
    }

    /// # Errors
    /// [`Interrupted`] once a signal has come.
    pub(crate) fn check(&self) -> Result<(), Interrupted> {
        if self.is_interrupted() { Err(Interrupted) } else { Ok(()) }
    }
}

impl Drop for Interruptible<'_> {
    fn drop(&mut self) {
        self.state.store(IDLE, Ordering::Relaxed);
    }
}

/// Something was stopped by a signal before it had a result.
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

/// Folders that a signal removes.
static FOLDERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
/// Times that the removal of a folder is tried: what still runs may write into it meanwhile.
const REMOVALS: usize = 10;

/// Has Ctrl-C and SIGTERM remove a folder and end the program. A second one ends the program at once.
///
/// # Errors
/// If no thread can be started.
pub(crate) fn remove_at_signal(folder: &Path) -> io::Result<()> {
    let mut folders = FOLDERS.lock().unwrap_or_else(PoisonError::into_inner);
    folders.push(folder.to_owned());
    if folders.len() > 1 {
        return Ok(());
    }
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let wait = move || {
        runtime.block_on(async {
            refrain_server::stop_signal().await;
            // The second signal is waited for here.
            let _ = tokio::task::spawn_blocking(remove_folders).await;
        });
        std::process::exit(130);
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(wait)?;
    Ok(())
}

/// Removes [`FOLDERS`], as far as they are there.
fn remove_folders() {
    for folder in FOLDERS.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        let _ = (0..REMOVALS).any(|_| fs::remove_dir_all(folder).is_ok() || !folder.exists());
    }
}
