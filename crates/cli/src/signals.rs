//! Ctrl-C and SIGTERM.

/// Waits for Ctrl-C or SIGTERM. A second one ends the program at once.
pub(crate) async fn stop_signal() {
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
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminate.recv() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}

/// Sets a flag at Ctrl-C or SIGTERM. A second one ends the program at once.
///
/// # Errors
/// If no thread can be started.
#[cfg(feature = "remote")]
pub(crate) fn stop_flag() -> std::io::Result<std::sync::Arc<std::sync::atomic::AtomicBool>> {
    let flag = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (set, runtime) = (flag.clone(), tokio::runtime::Builder::new_current_thread().enable_all().build()?);
    let wait = move || {
        runtime.block_on(async {
            stop_signal().await;
            set.store(true, std::sync::atomic::Ordering::Relaxed);
            // The second signal is waited for here.
            std::future::pending::<()>().await;
        });
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(wait)?;
    Ok(flag)
}
