//! Ctrl-C and SIGTERM, which stop a server.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Whether something in the program hears Ctrl-C.
static CTRL_C_IS_HEARD: AtomicBool = AtomicBool::new(false);
/// Whether something in the program hears SIGTERM.
static SIGTERM_IS_HEARD: AtomicBool = AtomicBool::new(false);

/// Waits for Ctrl-C or SIGTERM. A second one ends the program at once.
pub async fn stop_signal() {
    next_signal().await;
    tokio::spawn(async {
        next_signal().await;
        std::process::exit(130);
    });
}

async fn next_signal() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let (Ok(mut interrupt), Ok(mut terminate)) =
            (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
        {
            leave_signals(true);
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}

/// Has [`end_as_first_process`] leave Ctrl-C, and SIGTERM where that `hears_sigterm`, to a handler that stands already.
pub fn leave_signals(hears_sigterm: bool) {
    CTRL_C_IS_HEARD.store(true, Relaxed);
    SIGTERM_IS_HEARD.store(hears_sigterm, Relaxed);
}

/// Has Ctrl-C and SIGTERM end a program that is the first process of a container, as they end any other one: the system delivers to such a
/// process no signal that it does not handle. What hears them later on says so by [`leave_signals`].
pub fn end_as_first_process() {
    #[cfg(unix)]
    if std::process::id() == 1 {
        // Without the thread, the program has to be killed.
        let _ = std::thread::Builder::new().name("first process".to_owned()).spawn(end_by_signal);
    }
}

/// Ends the program at a signal that nothing else hears.
#[cfg(unix)]
fn end_by_signal() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (mut interrupt, mut terminate) =
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        loop {
            let (is_heard, status) = tokio::select! {
                _ = interrupt.recv() => (&CTRL_C_IS_HEARD, 130),
                _ = terminate.recv() => (&SIGTERM_IS_HEARD, 143),
            };
            if !is_heard.load(Relaxed) {
                std::process::exit(status);
            }
        }
    })
}
